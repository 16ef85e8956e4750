"""What an item costs, from config.json and pixel sizes alone. Knows neither torch nor Ray."""
