"""Training, evaluation and prediction programs: single-shot detectors on Gaudi, GPU and CPU."""
