"""Sections of the HTML report, each a function from the report folder to a part of the page."""
