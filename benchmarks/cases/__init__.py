"""One question a file, each a program that writes its answer to a results folder."""
