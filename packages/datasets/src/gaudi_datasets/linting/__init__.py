"""What is wrong with a data set, found before any training: a report as table, JSON and image sheet."""
