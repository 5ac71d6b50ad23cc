"""Sequence mixers other than softmax attention, found by the state that they carry."""
