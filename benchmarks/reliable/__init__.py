"""One small file for each contestant: it trains the same model, saves each epoch and goes on by itself."""
