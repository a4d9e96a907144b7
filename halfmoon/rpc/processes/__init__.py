"""What a service process has on its host: private files, directories that go with it, descriptors, its template."""
