"""Shows a comparison of methods: as a figure, as a page, in the terminal."""
