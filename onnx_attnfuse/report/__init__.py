"""The report: frozen records of every site, and their renderers as text, JSON and pages."""
