"""Does `compare` see through two programs of one model, and does it find what is wrong in one of them? See README.md."""
