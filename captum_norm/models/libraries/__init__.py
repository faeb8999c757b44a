"""How the attention of each library's models is reached, and what their arguments are called."""
