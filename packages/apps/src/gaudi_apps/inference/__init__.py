"""Use of a trained network: scores, predictions on images and videos, exports."""
