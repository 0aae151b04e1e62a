"""Serve a trained network over HTTP, and lay out its exports for servers of others."""
