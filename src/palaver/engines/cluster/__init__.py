"""Engine replicas on Ray Serve: what runs in a replica, how a request finds one, and the engine that fronts use."""
