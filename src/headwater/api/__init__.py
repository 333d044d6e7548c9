"""The Python API: everything that ``from headwater import ...`` offers. See docs/python-api.md."""
