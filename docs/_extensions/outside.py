"""Links of pages to files that are not on the site, and the drawing of the packages."""
