"""Files and devices: from a folder to a network where it runs."""
