"""Show a run while it trains: numbers as text, the table, bar and curves of a terminal, the output of a notebook."""
