"""The libraries of the web pages: their npm packages, and what copies their files to where the pages load them from."""
