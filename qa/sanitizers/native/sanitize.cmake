# Included at the end of project(plk), through CMAKE_PROJECT_plk_INCLUDE: compile with sanitizers.
#
# PLK_SANITIZE   address (with undefined behaviour) or thread
# PLK_SCOPE      core: the shim and libllama; whole: ggml too
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    message(FATAL_ERROR "sanitizers need gcc: set CC=gcc CXX=g++ and build again")
endif()
if(PLK_SANITIZE STREQUAL "address")
    set(plk_sanitizers -fsanitize=address,undefined)
    set(plk_flags ${plk_sanitizers} -fsanitize-recover=address,undefined)
else()
    set(plk_sanitizers -fsanitize=thread)
    set(plk_flags ${plk_sanitizers})
endif()
list(APPEND plk_flags -O1 -g1 -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS -w)
add_link_options(${plk_sanitizers})
if(PLK_SCOPE STREQUAL "whole")
    add_compile_options(${plk_flags})
endif()

# The targets do not exist yet.
function(plk_sanitize)
    foreach(target plk llama)
        target_compile_options(${target} PRIVATE ${plk_flags})
    endforeach()
    # planted.h proves that objects of llama are instrumented.
    set_source_files_properties("${PLK_LLAMA_SRC}/src/${PLK_PLANTED}" TARGET_DIRECTORY llama
        PROPERTIES COMPILE_OPTIONS "-include;${PLK_PLANTED_HEADER}")
endfunction()
cmake_language(DEFER CALL plk_sanitize)
