"""Random requests with images on workers that compute: what disturbs them changes no bit."""
