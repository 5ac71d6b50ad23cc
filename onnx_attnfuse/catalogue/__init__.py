"""The patterns of a run: where they come from (`packs`), what they are (`entries`), and rules of onnxscript (`foreign`)."""
