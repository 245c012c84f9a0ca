"""Where devices are. Each cohort answers `train` and `survey` with the same device code."""
