"""View: the cluster as one gateway sees it: workers as rows, their blocks, and when they were busy."""
