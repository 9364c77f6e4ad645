"""The report of runs: one HTML page with their curves, options, environment and checkpoints.

`records` reads the log of a run into series; `page` writes the page from report.html, report.css and report.js.
"""
