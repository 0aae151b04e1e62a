"""Objects in pictures: annotations, records, input pipelines and scores."""
