"""What programs that serve a model need to know of it; enter by `decoder.ServedDecoder`."""
