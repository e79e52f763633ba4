"""The page: a result as one HTML file that is read without a network. `web/` holds its sources."""
