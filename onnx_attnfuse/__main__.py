"""`python -m onnx_attnfuse` is `attnfuse`."""

import importlib
import sys

sys.exit(importlib.import_module("onnx_attnfuse_cli.main").main())
