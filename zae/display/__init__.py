"""Show a run while it trains: numbers as text, the table and bar of a terminal, the output of a notebook."""
