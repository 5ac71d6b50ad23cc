"""Certificates: the model before and the model after are executed symbolically, and their difference is handed to a solver."""
