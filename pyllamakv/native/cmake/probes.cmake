# Choose, for each group of the shim, the first candidate that compiles against the tree's headers.
#
# The compiler is called directly and only asked whether the file is right: CMake's own try_compile
# makes a project per question. An answer is kept under a hash of everything it depends on, so
# configuring again costs nothing and another tree in the same folder is asked again.

set(PLK_GROUPS log load context settings memory update cells counters defrag devices sampler rpc)
set(PLK_INCLUDES
    "${PLK_LLAMA_SRC}/include" "${PLK_LLAMA_SRC}/ggml/include"
    "${PLK_LLAMA_SRC}/src" "${PLK_LLAMA_SRC}/ggml/src")
