"""Patterns in graphs: `net` holds them all, `matching` finds them, `writing` writes what they mean beside what is written."""
