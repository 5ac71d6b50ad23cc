"""The matcher of formulas: `discrimination_net` holds all of them, `matcher` finds them, `replacement` builds what they mean."""
