"""`python -m onnx_attnfuse_cli` is `attnfuse`."""

import sys

from onnx_attnfuse_cli.main import main

sys.exit(main())
