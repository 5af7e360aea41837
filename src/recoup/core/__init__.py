"""The vocabulary of recoup: plain data and its laws; standard library and NumPy."""
