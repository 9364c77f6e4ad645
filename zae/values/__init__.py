"""What values are, whatever holds them: what an object contains, its bits, its description, and checks of arguments."""
