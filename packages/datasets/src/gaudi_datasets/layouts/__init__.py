"""Layouts of data sets as they are found: recognised by content, read without a conversion, and split where needed."""
