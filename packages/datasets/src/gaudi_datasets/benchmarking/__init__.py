"""How fast training gets its images from a data set, measured stage by stage on the data itself."""
