"""The page `report.html` of a run, and the one that compares several runs."""
