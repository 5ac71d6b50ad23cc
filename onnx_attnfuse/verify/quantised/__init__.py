"""Judging decoders whose cache is quantised; enter by `oracle.check_quantised` and `measure.measure`."""
