"""Training of MAR and of its autoencoder."""
