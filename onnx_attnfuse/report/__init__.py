"""What was found and done, as frozen records, and how it is printed."""
