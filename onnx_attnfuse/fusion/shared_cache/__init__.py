"""Past and present keys and values of a decoder as one buffer of a fixed length; enter by `share.Sharing`."""
