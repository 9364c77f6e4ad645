"""Write a composition as a script of plain PyTorch, without zae."""
