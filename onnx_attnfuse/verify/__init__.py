"""The judge: runs what a rewrite replaces and what it puts there, and says whether they are equal."""
