"""GLM-4.1V, GLM-4.5V and GLM-4.6V."""
