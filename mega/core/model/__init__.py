"""The mathematics of the model families. Knows neither data nor disk."""
