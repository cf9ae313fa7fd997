"""A run or an evaluation as one page: read.py finds it, chart.py draws it, page.py writes it. No torch."""
