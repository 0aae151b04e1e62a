"""Objects in images: annotations, records, input pipelines and scores."""
