"""The papers' tables and figures, trained, evaluated and written beside the published numbers.

What a cell needs is data: `experiment/catalog/papers.json`. Nothing here knows a table by name.
"""
