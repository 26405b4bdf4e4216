"""Record what a program does with a cache, play it again, and minimize what fails."""
