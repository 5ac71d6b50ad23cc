"""The interface of a model for programs that serve it; enter by `decoder.ServedDecoder`."""
