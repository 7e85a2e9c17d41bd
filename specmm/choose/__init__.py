"""What is fastest here: chosen by measurement, remembered, and said."""
