"""Training, evaluation and prediction programs: detectors and classifiers on Gaudi, GPU and CPU."""
