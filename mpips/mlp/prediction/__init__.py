"""How long a step takes on each mesh, predicted from measured links and a measured step."""
